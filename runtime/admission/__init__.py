"""The door of the engine: who may enter, by one account of what is inside."""
