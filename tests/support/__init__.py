"""What tests share: real processes as ranks, and models small enough for them."""
