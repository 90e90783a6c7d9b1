"""KV blocks, the prefix cache, and later the tiers below them."""
