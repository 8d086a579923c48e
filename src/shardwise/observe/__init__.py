"""What a run tells its user: the metrics file, the progress line, the loss curve and the use of the hardware."""
