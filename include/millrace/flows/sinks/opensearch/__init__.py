"""Write documents to OpenSearch by bulk requests: answers item by item, and a size that follows the cluster's load."""
