"""Text, optimizer and the loop that trains one arm."""
