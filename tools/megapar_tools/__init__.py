"""What people run beside training: plans, checks, pictures, pages, moving a job over, preparing text."""
