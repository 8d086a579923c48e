"""Mixture-of-experts layers within one rank."""
