"""Small faults planted one at a time: each makes a number wrong, drops a wait, or skips a branch, and some test has to fail."""
