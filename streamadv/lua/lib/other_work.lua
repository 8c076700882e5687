-- is_other_work(id, text): whether the work entry of this id is not the one that has this text: a server that has lost
-- its last writes and whose clock was set back gives ids a second time.
-- KEYS  work
local function is_other_work(id, text)
  local entry = redis.call('XRANGE', keys.work, id, id)[1]
  return entry and not string.find(table.concat(entry[2], ' '), text, 1, true)
end
