"""Dividing a device's compute and holding its memory."""
