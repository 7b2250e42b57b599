"""Complete or not there: asynchronous, checksummed, for any number of ranks."""
