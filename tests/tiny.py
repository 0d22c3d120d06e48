"""The smallest settings of a whole run, for tests of what is around it."""

TINY = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=1",
    "data.max_bytes=60000",
    "data.seq_len=32",
    "data.batch_size=2",
    "evaluation.sequences=4",
]
