"""DES-LOC in Flower's vocabulary: messages, records, a strategy, a client."""
