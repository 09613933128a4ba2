"""How work is spread over ranks. Knows nothing of the model or of where bytes are kept."""
