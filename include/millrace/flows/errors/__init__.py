"""Dead letters: failed records, stored with the reason, listed, and sent again when the cause is corrected."""
