"""The training side: hears a protection, has the loop save, and acknowledges."""
