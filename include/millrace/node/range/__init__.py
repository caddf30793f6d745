"""What ingest and flush share: parked PChannels, samples of what a query did."""
