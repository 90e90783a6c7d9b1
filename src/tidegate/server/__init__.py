"""The OpenAI API, the tokenizer and the metrics, in a process without torch."""
