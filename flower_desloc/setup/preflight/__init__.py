"""What a run takes, before it starts: memory, disk, bytes, time, and whether there is so much."""
