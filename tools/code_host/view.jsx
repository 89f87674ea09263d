import * as React from 'react'
import * as ReactDOM from 'react-dom'
import { Viewer } from '@microsoft/sarif-web-component'
import log from './found.sarif.json'

ReactDOM.render(<Viewer logs={[log]} />, document.getElementById('app'))
