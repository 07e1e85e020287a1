"""Plans, ledgers, findings and explanations as text and as HTML."""
