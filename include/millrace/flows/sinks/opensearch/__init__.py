"""Write documents to OpenSearch by bulk requests, with a verdict for each item, and a size that adapts to the load."""
