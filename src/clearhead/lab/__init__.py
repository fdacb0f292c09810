"""Claims about Transformers as experiments: predict, train variants, measure, and decide with statistics."""
