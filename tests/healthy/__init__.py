"""Healthy training scripts of many shapes, none of which may be stopped or blamed. shapes.py is the table."""
