"""From a request to its response: generations, embeddings, streams."""
