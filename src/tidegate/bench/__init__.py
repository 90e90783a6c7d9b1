"""Load for any server that speaks OpenAI's API, and what its answers' timing says. Works without torch."""
