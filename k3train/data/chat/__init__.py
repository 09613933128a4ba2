"""Chats for supervised fine-tuning: read from JSON lines, rendered as XTML, packed into samples."""
