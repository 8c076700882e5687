-- append(group_id, packet, stream, name): append a packet to a stream; name: 'rollouts' or 'scoring'. Returns whether the
-- stream takes entries: after the last possible id it takes no more.
-- KEYS  ledger
--   packet  key, bytes, epoch, text (members), table; count: of the members
local function append(group_id, packet, stream, name)
  local id = redis.pcall('XADD', stream, '*', 'group_id', group_id, 'payload', packet.key, 'bytes', packet.bytes,
    'epoch', packet.epoch, 'members', packet.text, 'table', packet.table)
  if id.err then
    -- The first write of a script is refused above maxmemory. Producers have to be told so: nobody makes the stream anew.
    if string.find(id.err, 'OOM', 1, true) then error(id) end
    return false
  end
  count('pushed', packet.count)
  count(name, packet.count)
  count(name .. '_packets', 1)
  if packet.bytes ~= '0' then
    count('live_bytes', tonumber(packet.bytes))
    note_size(tonumber(packet.bytes), packet.count)
  end
  return true
end
