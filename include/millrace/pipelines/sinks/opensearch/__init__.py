"""Documents into OpenSearch by bulk requests: what is answered item by item, and a bulk whose size follows what the cluster takes."""
