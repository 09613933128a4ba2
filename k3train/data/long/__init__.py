"""Long samples made of documents and of tasks whose evidence lies anywhere in the window."""
