-- Members of a packet as text: a line 'index kind reward role' for each, in ascending order of their index. kind is
-- 'usable', or why the slot ended: failed, aborted, cancelled, unscorable; reward '-' = none yet.
-- role: train or baseline, in an evaluation group eval.

-- The members; none if the indices do not ascend: no producer sends such a packet.
local function members_of(text)
  local members, last = {}, -1
  for index, kind, reward, role in string.gmatch(text, '(%d+) (%S+) (%S+) (%S+)\n') do
    index = tonumber(index)
    if index <= last then return {} end
    members[#members + 1], last = {index = index, kind = kind, reward = reward, role = role}, index
  end
  return members
end
