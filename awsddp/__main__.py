from awsddp.cli.main import main

main()
