"""Where rows come from, a folder for each kind."""
