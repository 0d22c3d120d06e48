"""Commands around a run: studies, exports, evaluation, dry runs."""
