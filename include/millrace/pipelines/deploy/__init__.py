"""Creation and removal of a pipeline's parts (a saga over topics, indexes, workers), and its worker as a run."""
