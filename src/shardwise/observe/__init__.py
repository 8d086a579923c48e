"""What a run reports: the metrics file, the progress line, the loss curve and hardware utilisation."""
