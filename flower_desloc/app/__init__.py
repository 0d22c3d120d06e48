"""The app: configuration, tasks, runs, reports, studies and the command line."""
