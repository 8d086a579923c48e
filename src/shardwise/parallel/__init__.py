"""How ranks are laid out."""
