"""What devices, links and clusters can do: the catalogue, measurements on this host, arithmetic of a model."""
