"""A pipeline's parts made and unmade (a saga over real topics, indexes, workers), and its worker as a launched run."""
