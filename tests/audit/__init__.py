"""Standing audits: what is claimed for every model or template, tried on all that can be had."""
