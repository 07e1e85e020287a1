"""What knows devices. Each folder is one compiler's front end, and alone imports it."""
