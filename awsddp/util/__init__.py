"""What any module may use."""
