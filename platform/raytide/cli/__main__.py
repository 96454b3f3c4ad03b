from raytide.cli import main

main()
