"""What a found config becomes outside of autofit: text for other tools and for people, one file a
tool."""
