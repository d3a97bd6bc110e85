"""What `heedful bench` is made of: growth over lengths, the calls it makes, its budget, its result and what that says."""
