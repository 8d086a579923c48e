"""Long sequences divided over ranks: each holds a part of every row, and attention alone looks at the others'."""
