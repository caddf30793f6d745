"""What each machine of a cluster copies from the meta store into its data folder: catalog, settings, tokens, news."""
