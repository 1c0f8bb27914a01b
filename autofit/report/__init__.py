"""What is shown to people: the end of a search, its progress, and tables of plain data.

Nothing here prints.
"""
