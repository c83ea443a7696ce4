"""Networks of the policies: encoders of graphs and clusters, groupers and placers."""
