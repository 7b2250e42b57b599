"""A small world in plain English: stories, facts, questions, problems, made by a seed."""
