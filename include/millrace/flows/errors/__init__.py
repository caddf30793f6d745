"""What a flow could not process: written with its reason, listed, and sent again once the cause is mended."""
