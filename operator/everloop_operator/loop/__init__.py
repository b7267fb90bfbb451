"""When it happens: the queue, the cache and the pass, over Protocols of what they need of the world."""
