"""Many runs from one command: each in processes of its own, and a report of all."""
