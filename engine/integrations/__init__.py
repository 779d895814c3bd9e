"""Other libraries' extension points filled with an engine; each file imports its library by itself."""
