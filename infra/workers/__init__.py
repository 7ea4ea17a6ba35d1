"""What runs inside Ray's processes: one class a role, all data by path."""
